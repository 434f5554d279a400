"""What benchmarks/gpu_engine.py measures, and by which formulas."""
