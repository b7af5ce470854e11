"""Archives whose headers claim more data than they contain."""

import struct
import zipfile

MEGABYTE = 2**20


def zip_of_zeros(path, name, size, header=b""):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        member.write(header)
        for _ in range(size // MEGABYTE):
            member.write(bytes(MEGABYTE))


def npy_header(shape, dtype="|u1"):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
