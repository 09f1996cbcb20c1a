"""Read the width and height of a PNG, GIF or JPEG image from its first bytes."""

from __future__ import annotations

import struct


def image_size(head: bytes) -> list[int] | None:
    """[width, height] in pixels, or None when the bytes do not begin such an image."""
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR" and len(head) >= 24:
        return list(struct.unpack(">II", head[16:24]))
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return list(struct.unpack("<HH", head[6:10]))
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg_size(head)
    return None


def _jpeg_size(head: bytes) -> list[int] | None:
    """Read the first frame header, SOF0 to SOF15 (ITU-T T.81, table B.1)."""
    place = 2
    while place + 9 <= len(head) and head[place] == 0xFF:
        marker, length = head[place + 1], int.from_bytes(head[place + 2 : place + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", head[place + 5 : place + 9])
            return [width, height]
        place += 2 + length
    return None
