"""HTTP: a service that takes records, and services that give them."""
