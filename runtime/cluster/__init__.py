"""Starting workers and learning that they died; the only room that imports ray."""
