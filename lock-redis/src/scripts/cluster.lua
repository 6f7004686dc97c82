-- What a node of a cluster does differently; docs/redis.md says why.
-- KEYS: 5 a key that is never there, so that no script with several keys runs while the slot is moved to another node.
-- ARGV: the last one the run id of this node, with which the names of clients end that are subscribed here.
PUBLISH, HERE = 'SPUBLISH', ARGV[#ARGV]
