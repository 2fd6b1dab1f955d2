"""Channels between subtasks: credits, partitioners, wire format, sockets."""
