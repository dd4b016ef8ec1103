"""Criterions that the plugin registers with fairseq."""
