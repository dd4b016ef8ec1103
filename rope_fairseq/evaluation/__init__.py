"""Scoring of translations; nothing in here needs fairseq."""
