"""What the pages in a browser have in common: their files, the headers of all answers, and who may use a page on loopback."""
