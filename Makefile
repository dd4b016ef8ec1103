# make venv PYTHON=python3.11   the environment (Linux x86-64, Python 3.11 or 3.12)
# make demo                     a model in minutes: trained, averaged, translated, scored
# make test, make lint          the checks
# make bench                    time and memory beside other systems, into README.md (make bench-full: more)
# make bench-encodings          parameters and time of all position encodings, into README.md
# make bench-lengths            time and memory of attention over length, softmax and linear, into README.md
# make clean                    remove .venv, caches and build output; exp/ (your runs) stays

.PHONY: venv demo test lint bench bench-full bench-encodings bench-lengths clean

venv: .venv/.complete

.venv/.complete: requirements.lock setup.py scripts/venv.sh
	@scripts/venv.sh

demo: venv
	@PYTHON=$(CURDIR)/.venv/bin/python scripts/reproduce.sh demo

# One thread a process: the tests start many, and threads that share a core slow each other down.
test: venv
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest

lint: venv
	@scripts/lint.sh

bench: venv
	@.venv/bin/python -m benchmarks.bench --output results/bench.json --page README.md

bench-full: venv
	@.venv/bin/python -m benchmarks.bench --full --output results/bench-full.json --page docs/speed.md

bench-encodings: venv
	@.venv/bin/python -m benchmarks.bench --only encodings --output results/encodings.json --page README.md

bench-lengths: venv
	@.venv/bin/python -m benchmarks.lengths --output results/lengths.json --page README.md

clean:
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache && find . -name __pycache__ -prune -exec rm -rf {} +
