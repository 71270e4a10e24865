"""The command line. Each file holds one group of commands; `app` assembles them."""
