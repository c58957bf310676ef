# Copy the filled file of a release into a tap: `Formula/mmfree.rb`.
class Mmfree < Formula
  desc "Run, fine-tune and train ternary language models with MLX"
  homepage "@REPOSITORY@"
  version "@VERSION@"
  license "MIT"

  # begin MACOS_ARM
  on_macos do
    depends_on arch: :arm64
    depends_on macos: :sonoma
    url "@URL@", using: :nounzip
    sha256 "@SHA256@"
  end
  # end MACOS_ARM

  on_linux do
    # begin LINUX_INTEL
    on_intel do
      url "@URL@", using: :nounzip
      sha256 "@SHA256@"
    end
    # end LINUX_INTEL
    # begin LINUX_ARM
    on_arm do
      url "@URL@", using: :nounzip
      sha256 "@SHA256@"
    end
    # end LINUX_ARM
  end

  depends_on "python@@PYTHON@"

  # the libraries of MLX find each other by paths that must stay as they are
  preserve_rpath

  def install
    # MLX has wheels only, so that pip brings the dependencies
    system Formula["python@@PYTHON@"].opt_bin/"python@PYTHON@", "-m", "venv", libexec
    wheel = buildpath.glob("*.whl").first
    system libexec/"bin/python", "-m", "pip", "install", "--only-binary", ":all:", "#{wheel}[serve]"
    bin.install_symlink libexec/"bin/mmfree"
  end

  service do
    run [opt_bin/"mmfree", "serve"]
    keep_alive true
    log_path var/"log/mmfree.log"
    error_log_path var/"log/mmfree.log"
  end

  test do
    port = free_port
    server = spawn bin/"mmfree", "serve", "--port", port.to_s
    begin
      health = "http://127.0.0.1:#{port}/health"
      assert_match "ok", shell_output("curl -sS --retry 30 --retry-connrefused --retry-delay 1 #{health}")
    ensure
      Process.kill "TERM", server
      Process.wait server
    end
  end
end
