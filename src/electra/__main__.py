from electra.commands import main

main()
