"""The errors whose cause is outside the code that raises them; everything else is a defect and shows a traceback."""


class UserError(Exception):
    """Something the user gave is wrong. The message is complete: what, where, what was expected, the cure. Exit code 2."""

    exit_code = 2


class JobLost(Exception):
    """Another process of the job died, froze or ended the job; the message names it. Exit code 75 (EX_TEMPFAIL)."""

    exit_code = 75
