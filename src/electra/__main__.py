from electra.cli import main

main()
