"""The state of jobs: what operators remember, in memory and on disk, and the shapes in which they hand it
over.
"""
