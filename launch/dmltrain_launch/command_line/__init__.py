"""The command line: options, their old spellings, configuration files."""
