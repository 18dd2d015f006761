"""What every part needs and that needs no part: errors, the environment, arrays, files that are whole, texts."""
