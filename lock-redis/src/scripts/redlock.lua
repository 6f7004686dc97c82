-- What a node of several independent servers does differently; docs/redlock.md says why.
-- KEYS: 5 since when this node has its data.
-- ARGV: the last but one the client's proposal for the token and its place in the queue (us of the servers' clocks, 0 for
-- none), the last one the longest ttl that clients may ask for (ms).
local BORN = KEYS[5]
-- A proposal that is older (us) may be below tokens that this node has forgotten: its data may be an older copy.
local FRESH = 500000
local PROPOSAL, MAX_TTL = tonumber(ARGV[#ARGV - 1]), tonumber(ARGV[#ARGV])
if PROPOSAL > 0 then
    PLACE = PROPOSAL
end

-- Since when the node has its data: 'new', or 'open' if it may grant at once; for how many ms; and the stamp. A node that
-- has lost its data begins anew.
local function born()
    local state, since = string.match(redis.call('GET', BORN) or '', '^(%l+) (%d+)$')
    if not state or tonumber(since) > now_us then
        state, since = 'new', stamp
        redis.call('SET', BORN, state .. ' ' .. since)
    end
    return state, (now_us - tonumber(since)) / 1000, since
end

-- For how many ms the node grants nothing, because leases that it has lost may be valid; nil if it grants.
local function young()
    local state, age = born()
    if state == 'new' and age < MAX_TTL then
        return math.ceil(MAX_TTL - age)
    end
end

-- Sets the counter, which is needed until the clock has passed it for good.
local function count(token)
    redis.call('SET', FENCE, token, 'PX', math.max(0, math.ceil((tonumber(token) - now_us) / 1000)) + RETENTION)
end

-- Draws a token: higher than the last one, and the proposal if that is possible, so that nodes agree.
local function draw()
    local last = redis.call('GET', FENCE)
    if last and not string.match(last, '^%d+$') then
        error('fencelock: foreign value in ' .. FENCE)
    end
    local behind = now_us - PROPOSAL
    local usable = behind >= 0 and behind < FRESH
    if usable and not last then
        -- A counter that has expired was below the proposal. One that was lost may have been above it, but not above the clock.
        local _, age = born()
        usable = age >= tonumber(RETENTION)
    end
    local token = math.max(tonumber(last or 0) + 1, usable and PROPOSAL or now_us)
    if token > TOP_TOKEN then
        error('fencelock: foreign value in ' .. FENCE)
    end
    local drawn = text(token)
    count(drawn)
    return drawn
end
