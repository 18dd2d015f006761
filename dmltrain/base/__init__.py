"""What every other package needs, and what needs none of them: errors, the environment, arrays, whole files, texts."""
