"""Ray Datasets as bounded sources. A dataset is used by its own methods: nothing here imports Ray."""
