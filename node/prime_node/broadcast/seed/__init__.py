"""Seeders: they store the encodings of the newest policies and serve them, without decoding any."""
