"""Other libraries beside our solvers, each a program that needs the library it compares with."""
