"""Weight formats, one file each: how a matrix lies in memory, and how it is multiplied."""
