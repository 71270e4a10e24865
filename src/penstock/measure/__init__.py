"""Everything that times things: layers, links, actions, memory."""
