"""Who can change a file or folder of this host: this user and root, or others as well."""

from __future__ import annotations

import errno
import os
import stat

ROOT = 0
ACL = "system.posix_acl_access"


def is_foreign(status: os.stat_result) -> bool:
    """Whether it belongs to neither this user nor root."""
    return status.st_uid not in (os.geteuid(), ROOT)


def others_can_write(status: os.stat_result, descriptor: int) -> bool:
    """Whether users other than its owner and root can write it. The rights of an access control list show in the mode
    as those of the group."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and (_has_list(descriptor) or not is_private(status.st_gid))


def _has_list(descriptor: int) -> bool:
    try:
        return bool(os.getxattr(f"/proc/self/fd/{descriptor}", ACL))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)


def is_private(group: int) -> bool:
    """Whether this user is the only member of the group, which has the user's name, as many systems set it up."""
    import grp
    import pwd

    try:
        own, owning_group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    if own.pw_gid != group or owning_group.gr_name != own.pw_name or set(owning_group.gr_mem) - {own.pw_name}:
        return False
    return all(account.pw_uid == own.pw_uid for account in pwd.getpwall() if account.pw_gid == group)


def user_name(number: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
