"""Everything that measures: the time of layers, links and actions, and the memory they need."""
