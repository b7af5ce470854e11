"""Bridges to other programs and files. Each imports what it needs when it is used."""
