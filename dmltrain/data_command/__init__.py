"""`dmltrain-data`: packs, checks, divides and shows data sets of encoded images. One file and one row for each verb."""
