"""State in arrays by slot: the slots of keys, arrays that grow, and consistent cuts of them."""
