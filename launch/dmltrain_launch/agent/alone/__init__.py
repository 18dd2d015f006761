"""What an agent does when its launcher is lost and its job lives on: it keeps what it sends for the next one."""
