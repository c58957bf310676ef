from mlx_mmfree.cli.convert import main

raise SystemExit(main())
