"""How ranks exchange tensors: between threads, or between processes."""
