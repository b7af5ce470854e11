"""Conversion to and from other programs and file formats. Each module imports its dependencies when it is used."""
