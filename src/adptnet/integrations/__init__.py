"""Conversion to and from other frameworks and file formats. Each module imports its dependencies when it is used."""
