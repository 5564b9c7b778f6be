"""The messages of proto/ferry/v1, generated while the package is built."""
