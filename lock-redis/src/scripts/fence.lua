-- Stands for itself. KEYS: the mark: the highest token of those that write, and behind a blank that of those that share, if it is higher.
-- ARGV: the token, with an 's' before it if its holder shares the lock, then the command to carry out, if any.
local shares, token = string.match(ARGV[1], '^(s?)(%d+)$')
if not token then
    error('fencelock: not a token')
end
local value = redis.call('GET', KEYS[1])
local mark, shared = string.match(value or '0', '^(%d+) ?(%d*)$')
if not mark then
    error('fencelock: foreign value in ' .. KEYS[1])
end
local function below(one, other)
    return tonumber(one) < (tonumber(other) or 0)
end
if below(token, mark) then
    return { 'stale', mark }
end
if shares == '' then
    if below(token, shared) then
        return { 'stale', shared }
    end
    mark, shared = token, ''
elseif not below(token, shared) then
    shared = token
end
local raised = below(mark, shared) and mark .. ' ' .. shared or mark
if raised ~= value then
    redis.call('SET', KEYS[1], raised)
end
if #ARGV == 1 then
    return { 'admitted', 'OK' }
end
return { 'admitted', redis.call(unpack(ARGV, 2)) }
