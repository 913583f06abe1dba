"""``kvasir solve``: solve problems of the lab with strategies of test-time scaling, and compare their cost."""
