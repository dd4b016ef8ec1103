"""What rotary embedding does over distance, by formula, and what trained attention does with it.

``python -m rope_fairseq.analysis`` has a command for each figure. Only ``attention``, which runs a
model, needs fairseq.
"""
