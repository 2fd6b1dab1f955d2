"""Real servers for tests of connectors, on loopback and without containers.

Each recipe makes the program from a package registry once, and starts it on ports that the operating
system hands out.
"""
