"""MXNet's own kvstores behind the interface of ours."""
