"""The layers of section 3, a file each."""
