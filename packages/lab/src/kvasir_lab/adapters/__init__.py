"""Training of small changes to a lab model: five PEFT methods and the loop that trains them."""
