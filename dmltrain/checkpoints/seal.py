"""Whether a checkpoint file is whole: its last line has the sha256 of all bytes before it.

In a zip archive (.pt, .npz) this line is the archive's comment. In MXNet's .params it follows the arrays; MXNet stops
reading before it. So PyTorch, NumPy, MXNet and unzip read these files like files without the line. Files of dmltrain
0.4 and of other programs have no such line. Without it, archives still have a checksum for each member; .params has
none.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zipfile
from dataclasses import dataclass

from dmltrain.base import npz

LINE = re.compile(rb"\ndmltrain sha256 ([0-9a-f]{64})\n")
LINE_BYTES = 82  # length of LINE
ARCHIVE_END = struct.Struct("<4s8s4s4sH")  # the record at the end of a zip archive; its last field: length of a comment
ARCHIVES = (".pt", ".npz")


@dataclass(frozen=True)
class Examined:
    """A file's content, the sha256 of all of it in hexadecimal, and what is damaged; "" if it is whole."""

    content: bytes
    digest: str
    damage: str


def sealed(content: bytes) -> bytes:
    """The content of a file with the line that tells whether it is whole."""
    parts = [memoryview(content)]
    if _is_complete_archive(content):  # its last field, 2 bytes, is the length of the comment that follows
        parts = [parts[0][:-2], memoryview(struct.pack("<H", LINE_BYTES))]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, b"\ndmltrain sha256 %s\n" % digest.hexdigest().encode()])


def examine(content: bytes, suffix: str) -> Examined:
    """`suffix`: of the file's name. A file that is not an archive and has no line counts as whole."""
    view = memoryview(content)
    line = LINE.fullmatch(view[-LINE_BYTES:])
    digest = hashlib.sha256(view[:-LINE_BYTES])
    actual = digest.hexdigest()
    digest.update(view[-LINE_BYTES:])
    damage = ""
    if line and actual != line[1].decode():
        damage = f"its content has sha256 {actual[:12]}..., and its last line says {line[1][:12].decode()}..."
    elif not line and suffix in ARCHIVES:
        damage = _archive_damage(content)
    return Examined(content, digest.hexdigest(), damage)


def _is_complete_archive(content: bytes) -> bool:
    """Whether it ends with the end record of an archive without a comment, as torch.save and numpy.savez write it."""
    end = content[-ARCHIVE_END.size :]
    return len(end) == ARCHIVE_END.size and end.startswith(b"PK\5\6") and end.endswith(b"\0\0")


def _archive_damage(content: bytes) -> str:
    if not _is_complete_archive(content):
        return f"the end of its {len(content)} bytes is missing or altered"
    try:
        npz.check(content)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
    except ValueError as error:
        return str(error)
    except Exception:  # zipfile raises many types of errors for damaged files
        damaged = "its table of contents"
    return f"{damaged} of its {len(content)} bytes is unreadable" if damaged else ""
