from mlx_mmfree.cli.generate import main

raise SystemExit(main())
