"""How ranks exchange tensors: between threads, between processes, or over an emulated slow network."""
