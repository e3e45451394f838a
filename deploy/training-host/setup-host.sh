# What dflash-ops guard setup $name prints: to be read, then run as root on $name ($address) and nowhere else.
# It makes one login that reaches the gate program and nothing else. No other login of the host changes.
# The file dflash-gate has to lie beside it; on the operator's machine that is
#   $program
set -eu
umask 022                       # sshd reads some of these files as $user

# 1. This is $name, and every key that its sshd shows is in hosts.yaml
for key in /etc/ssh/ssh_host_*_key.pub; do
    case $$(ssh-keygen -lf "$$key") in
        $fingerprints) ;;
        *) echo "$$key is not among host_keys of $name in hosts.yaml: add it there, then print this again"; exit 1 ;;
    esac
done

# 2. The login, used for nothing else. It must be able to read what is to be relayed:
#    runuser -u $user -- head -c 1 CHECKPOINT
if [ -e $state ] && [ "$$(stat -c %U $state)" != $user ]; then
    echo "$state is not a folder of $user alone: name another as gate_state in hosts.yaml"; exit 1
fi
home=$$(getent passwd $user | cut -d: -f6)
if [ -s "$$home/.ssh/authorized_keys" ]; then
    echo "$user has keys in $$home/.ssh/authorized_keys, which this would lock out: name a login nobody uses"; exit 1
fi
id -u $user > /dev/null 2>&1 || useradd --system --shell /bin/sh --home-dir $state $user
if [ "$$(id -u $user)" = 0 ]; then echo "root cannot be the login of the gate"; exit 1; fi

# 3. The gate program, root's and unwritable for $user; Python 3.9 or newer as /usr/bin/python3 runs it
/usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))'
echo '$sha256  dflash-gate' | sha256sum -c -
install -o root -g root -m 0755 dflash-gate $gate

# 4. Budgets, spent serials and the gate's log, which nobody but $user may touch, and the gate's configuration
install -d -m 0700 -o $user -g "$$(id -g $user)" $state
install -d -o root -g root -m 0755 /etc/dflash
cat > $config <<'END'
$configuration
END

# 5. Who may approve: the operator's CA. The list of revoked certificates must exist, or sshd refuses every key
echo '$ca_public_key' > $ca
echo dflash-gate > $principals
[ -e $revoked ] || { ssh-keygen -q -k -f $revoked && chown $user $revoked; }
$jobs
# $last. sshd: one Match block, at the very end of its configuration, tried before it counts
sshd=$$(command -v sshd || echo /usr/sbin/sshd)
if ! grep -q '^Match User $user$$' /etc/ssh/sshd_config; then
    cp -p /etc/ssh/sshd_config /etc/ssh/sshd_config.before-dflash
    cat >> /etc/ssh/sshd_config <<'END'

$match
END
fi
if ! "$$sshd" -t; then
    echo "put it back: mv /etc/ssh/sshd_config.before-dflash /etc/ssh/sshd_config"; exit 1
fi
# what holds for $user in the end, whatever stands before the block: a setting that comes first wins
"$$sshd" -T -C user=$user,host=localhost,addr=127.0.0.1 > /etc/dflash/effective
while read -r setting; do
    grep -qixF -e "$$setting" /etc/dflash/effective ||
        { echo "for $user '$$setting' does not hold: look at what stands before the block in sshd_config"; exit 1; }
done <<'END'
$settings
END
echo "The configuration is sound. Now, and not before: systemctl reload ssh"
# Where sshd_config has AllowUsers or AllowGroups, $user has to be among them; where it has UsePAM no, the account must
# not be locked: usermod -p '*' $user. Then, on the operator's machine: dflash-ops guard doctor $name
