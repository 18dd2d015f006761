"""What people see of a job: output with tags, the live display, reports, the folder of logs."""
