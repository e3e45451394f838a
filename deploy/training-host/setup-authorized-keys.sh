# What dflash-ops guard setup $name prints: to be read, then run as $user on $name ($address) and nowhere else.
# For a host whose sshd_config cannot be edited. It is weaker than the sshd block; what it leaves open:
#   - the gate program, budgets, spent serials and log belong to $user, so an approved command can rewrite them;
#   - sshd does not hand the certificate to the gate: serial and digest stand in the signed forced command instead;
#   - whoever logs in as $user in another way, by another line of authorized_keys or a password, meets no gate;
#   - a certificate of your CA without a forced command would be a shell. dflash-ops never signs one; neither must you.
# The file dflash-gate has to lie beside it; on the operator's machine that is
#   $program
set -eu
umask 077
test "$$(id -un)" = $user

# 1. The gate program and its configuration
/usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))'
echo '$sha256  dflash-gate' | sha256sum -c -
mkdir -p "$$HOME/.dflash" "$$HOME/.ssh" $state
install -m 0700 dflash-gate "$$HOME/.dflash/dflash-gate"
cat > "$$HOME/.dflash/gate.json" <<'END'
$configuration
END
chmod 0700 "$$HOME/.dflash" "$$HOME/.ssh" $state

# 2. The one line by which the operator's certificates log in. It has no command=, because sshd refuses a login whose
#    certificate forces another command than the line does
cat > "$$HOME/.dflash/authorized_keys.line" <<'END'
$authorized_keys
END
touch "$$HOME/.ssh/authorized_keys"
grep -qxF -f "$$HOME/.dflash/authorized_keys.line" "$$HOME/.ssh/authorized_keys" ||
    cat "$$HOME/.dflash/authorized_keys.line" >> "$$HOME/.ssh/authorized_keys"

# 3. Every other line is a way past the gate: take it out, once you have another way to this account
if grep -vxF -f "$$HOME/.dflash/authorized_keys.line" "$$HOME/.ssh/authorized_keys" | grep -q '^[^#]'; then
    echo "$$HOME/.ssh/authorized_keys has other lines: each of them passes the gate by"
fi
# Then, on the operator's machine: dflash-ops guard doctor $name
