"""The frameworks, each behind one small interface; they are imported here only, and only when used."""
