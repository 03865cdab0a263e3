"""Other systems' releases: their wheels' own default files, read as archives."""
