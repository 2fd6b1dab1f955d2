"""A source of MySQL and MariaDB: the changes of a table."""
