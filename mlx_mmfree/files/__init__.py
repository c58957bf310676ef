"""Files that come from strangers and files that must appear whole: opening, links, JSON, writing."""
