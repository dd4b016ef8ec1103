"""A parallel corpus from its source to fairseq's binary data.

A corpus is a folder of ``train|valid|test.LANG``, one sentence a line, line n of one language
translating line n of the other. Memory does not grow with the number of lines: text goes through
in blocks, and what must be known of all lines (duplicates, words) is kept on disk.
"""
