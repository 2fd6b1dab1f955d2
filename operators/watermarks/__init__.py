"""How far event time has come: what makes watermarks, and how those of several splits become one."""
