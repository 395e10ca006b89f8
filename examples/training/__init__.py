"""The parts of `examples/07_train.py`: model, sharding, data, state, report and check."""
